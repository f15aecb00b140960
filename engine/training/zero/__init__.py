"""DeepSpeed's ZeRO as a Trainer; deepspeed is imported only if a ZeRO strategy is chosen."""
