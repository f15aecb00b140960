"""A study as scripts for a cluster on which nothing but sbatch may be used, and scripts for those without Slurm."""
