"""The nouns: study, cell, target, job, record, paths. Values only; they import nothing of ours."""
