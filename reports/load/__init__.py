"""Load runs: from raw samples of requests to latencies, rates, verdicts and the highest rate under objectives."""
