"""From a study and its inputs to a plan with predictions. Imports no Prefect."""
