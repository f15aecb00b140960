"""What our step is compared with: a bare PyTorch loop, and ranks that train apart."""
