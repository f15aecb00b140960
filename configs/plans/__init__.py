"""Plans, jobs and records of a study, and the layout of the run folder."""
