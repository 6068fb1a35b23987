"""Where rows belong: events on nodes and GPUs, installations by the evidence of samples, and slots by their time."""
