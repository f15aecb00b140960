"""`rankwise doctor` and its calibration."""
