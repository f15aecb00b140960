"""A real Slurm cluster on one Linux machine, to try what a cluster would do before paying for one.

munge, MariaDB, slurmdbd, slurmctld and one slurmd for each node run here; each node has its own network, host
name and name resolution (namespaces), its own cores, and a link whose speed can be chosen. `docs/lab.md` says
what can be learnt with it and what cannot.

    plan      what a lab is: names, addresses, cores, folders
    files     the configuration files, as text
    members   which processes on this machine belong to a lab; needs no state but the processes themselves
    network   bridge, links, their speed
    nodes     the namespaces that make a node
    daemons   start and stop; is it up, and if not, why
    cluster   up, status, down

All needs root rights. `down` needs nothing but the lab's name: everything is found by marks that it bears.
"""
