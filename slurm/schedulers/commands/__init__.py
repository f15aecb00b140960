"""Slurm's commands (sbatch, srun, squeue, sacct, scontrol, sinfo): how they are called, and what they print, parsed."""
