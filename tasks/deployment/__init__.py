"""From a model to a running service: bundles, places, servers behind a front, rollouts. No Prefect here.

targets       what --target names
level_checks  the levels measured on the target's hardware
bundles       what is served, and the evidence for it
fit           whether it fits, and the smallest target on which it does
places        this machine and hosts by SSH, in one form
servers       services on a place: started, tested with the first requests, ended
fronts        the address before them, and tunnels to them
deploying     the whole way, and back
"""
