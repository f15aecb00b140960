"""Data-parallel and tensor-parallel strategies of torch, and their shared parts."""
