"""Dollars as a person reads them: with cents, and below ten cents with two digits, so that no cost is `0.00`.

dollars(1204.5), dollars(0.0033)          # "1,204.50", "0.0033"
"""


def dollars(usd: float) -> str:
    """Return an amount without its sign or unit; 0 is `0.00`."""
    return f"{usd:,.2f}" if usd == 0 or usd >= 0.1 else f"{usd:.2g}"
