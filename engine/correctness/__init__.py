"""Collect a rank's answers for later checks, and measure the noise of reduction orders."""
