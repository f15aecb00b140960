"""Commands that read finished runs: status, report, compare, history, fit, logs."""
