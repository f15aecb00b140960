"""A real Slurm cluster on one Linux machine, for testing without a rented cluster.

munge, MariaDB, slurmdbd, slurmctld and one slurmd per node run on this machine. Each node has its own network, host
name and name resolution (namespaces), its own cores, and a link with a configurable speed. `docs/how-
to/clusters/lab.md` lists uses and limitations.

    plan      what a lab is: names, addresses, cores, folders
    files     the configuration files, as text
    members   find the processes of a lab on this machine without any stored state
    network   bridge, links, their speed
    nodes     the namespaces that make a node
    daemons   start, stop and check daemons
    cluster   up, status, down

Everything requires root. `down` needs only the lab's name, because every part of a lab is marked with it.
"""
