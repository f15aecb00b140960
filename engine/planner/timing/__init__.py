"""Time model: computation, communication and bubbles of training steps and of inference."""
