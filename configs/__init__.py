"""Data models: study, cell, target, job, record, paths. They import no other package of the project."""
