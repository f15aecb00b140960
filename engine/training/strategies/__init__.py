"""How ranks keep their replicas equal: strategies of torch, and what they share."""
