"""OpenPBS and PBS Professional behind `slurm.schedulers.cluster`.

calls       run qsub, qstat, qselect, qdel and pbsnodes
jobs        what qstat says of jobs, in Slurm's words
queue       one qstat per interval for all jobs of a process
submission  the job's script, qsub's options and its refusals
vnodes      queues and nodes, and checks of a study against them
"""
