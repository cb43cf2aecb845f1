"""Handlers of boosted trees: XGBoost and LightGBM."""
