"""Parameters of models that are fitted in a moment."""


def lightgbm_alone(trees: int, *others: str) -> str:
    """Return parameters with one learner of so many trees, alone in every ensemble; ``others``: further sections."""
    models = f"""
models:
  profile: lightgbm
  learners: [lightgbm]
  parallel: {{members: [lightgbm], combiner: mean_log_odds}}
  cascade: {{stages: [lightgbm]}}
  horizons: []
  settings: {{lightgbm: {{n_estimators: {trees}}}}}
"""
    return models + "\n".join(others)
