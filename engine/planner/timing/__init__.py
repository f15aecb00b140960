"""Seconds: computation, communication, bubbles, of training steps and of inference."""
