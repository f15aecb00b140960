"""Jobs on hosts that are reached by SSH (`slurm.ssh`).

adapter  submit, poll, cancel
job      one job from its hosts' choice to its end
node     its part on one host
turns    which jobs of this process have which hosts
ending   how a job ended
"""
