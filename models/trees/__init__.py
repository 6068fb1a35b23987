"""Compiled scoring of tree models, straight from their files: neither LightGBM, XGBoost nor scikit-learn is imported.

A reader a format (:mod:`~models.trees.lightgbm_text`, :mod:`~models.trees.xgboost_ubj`,
:mod:`~models.trees.forest_skops`), one flat form (:mod:`~models.trees.flat`), one compiled kernel
(:mod:`~models.trees.kernel`), and what scores (:mod:`~models.trees.evaluate`).
"""
