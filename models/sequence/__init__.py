"""Sequence learners on raw windows: an LSTM and a convolutional network (extra ``sequence``)."""
