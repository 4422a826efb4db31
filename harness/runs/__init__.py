"""The life of a run: its folder, fit and test with resume, signals, launchers, TensorBoard, saved nets."""
