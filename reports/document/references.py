"""Related measurements and methods that a paper cites, by key."""

REFERENCES = {
    "amdahl": (
        "G. M. Amdahl. Validity of the single processor approach to achieving large scale computing capabilities. "
        "AFIPS Conference Proceedings 30 (1967), 483-485."
    ),
    "gustafson": "J. L. Gustafson. Reevaluating Amdahl's law. Communications of the ACM 31(5) (1988), 532-533.",
    "eager": (
        "D. L. Eager, J. Zahorjan, E. D. Lazowska. Speedup versus efficiency in parallel systems. IEEE Transactions on "
        "Computers 38(3) (1989), 408-423."
    ),
    "hoefler": (
        "T. Hoefler, R. Belli. Scientific benchmarking of parallel computing systems: twelve ways to tell the masses "
        "when reporting performance results. SC 2015."
    ),
    "reddi": "V. J. Reddi et al. MLPerf inference benchmark. ISCA 2020.",
    "narayanan": (
        "D. Narayanan et al. Efficient large-scale language model training on GPU clusters using Megatron-LM. SC 2021."
    ),
    "pope": "R. Pope et al. Efficiently scaling transformer inference. MLSys 2023.",
    "kwon": (
        "W. Kwon et al. Efficient memory management for large language model serving with PagedAttention. SOSP 2023."
    ),
}
"""In the order in which the text cites them."""
