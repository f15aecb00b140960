"""A load generator for OpenAI-compatible servers: `python -m engine.load JOB.json FOLDER`. It never imports torch.

arrivals, lengths, contents    pure: when requests are due and what they ask, from a job and its seed
replies                        pure: a streamed response, chunk by chunk
connections                    HTTP/1.1 over asyncio
generator                      the loops that send, and the samples that they record
"""
