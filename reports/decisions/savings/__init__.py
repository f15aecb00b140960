"""What common savings would bring, where prices or measurements tell."""
