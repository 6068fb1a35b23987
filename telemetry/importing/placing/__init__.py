"""Where rows belong: ``events`` places events on nodes and GPUs, ``evidence`` corrects installations by samples."""
