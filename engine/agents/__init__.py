"""The programs that start a node's ranks: torchrun's agent and DeepSpeed's launcher, and what they import in
advance."""
