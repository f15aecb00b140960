"""Jobs on hosts that are reached by SSH: connections, what is carried to a host, and the jobs themselves."""
