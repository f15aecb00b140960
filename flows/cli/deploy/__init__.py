"""`rankwise deploy`, `deployments`, `rollout`, `scale`, `undeploy` and `route`."""
