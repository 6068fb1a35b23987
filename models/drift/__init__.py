"""What changed since a model was fitted: the measures, the causes told apart, and the words for them."""
