"""A study written as an sbatch bundle, and collected again. Imports no Prefect."""
