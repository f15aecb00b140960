"""Records: what one (cell, repeat, attempt) left, its raw samples, and the rates computed from them."""
