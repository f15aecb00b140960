"""Code and libraries on a shared folder of the cluster."""
