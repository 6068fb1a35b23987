"""Learners that read a raw window as a sequence: an LSTM and a convolutional network (the extra ``sequence``)."""
