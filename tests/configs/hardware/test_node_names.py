"""All spellings of a rented node mean the same."""

import pytest

from configs.hardware.node_names import parse_node_name


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("aws/g4dn.xlarge", "aws/g4dn.xlarge"),
        ("aws:g4dn.xlarge", "aws/g4dn.xlarge"),
        ("aws-g4dn.xlarge", "aws/g4dn.xlarge"),
        ("AWS-G4DN.xlarge", "aws/g4dn.xlarge"),
        ("gcp:n1-standard-4-t4", "gcp/n1-standard-4+t4"),
        ("gcp-n1-standard-4+2xt4", "gcp/n1-standard-4+2xt4"),
        ("gcp-n1-standard-8", "gcp/n1-standard-8"),
        ("azure:Standard_NC6s_v3", "azure/Standard_NC6s_v3"),
    ],
)
def test_spellings(text: str, full: str) -> None:
    assert parse_node_name(text).full == full


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g4dn.xlarge", "expected a provider and an instance"),
        ("aws", "expected a provider"),
        ("ibm/x", "expected a provider"),
        ("aws/g4dn.xlarg", "did you mean aws/g4dn.xlarge"),
        ("gcp:n1-standard-4-h100", "cannot be attached|unknown instance|ambiguous"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_node_name(text)
