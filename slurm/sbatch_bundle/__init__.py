"""Export of a study as scripts for clusters that only allow sbatch, and scripts for clusters without Slurm."""
