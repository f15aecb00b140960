"""Keep one process running on a host without systemd: started again, ended at its expiry, its state in files."""
