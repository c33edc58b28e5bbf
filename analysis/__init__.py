"""What runs say: tables in, fits and recommendations out. Never imports torch or optuna."""
