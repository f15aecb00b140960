"""DeepSpeed's ZeRO behind the same Trainer; deepspeed is imported only where one is chosen."""
