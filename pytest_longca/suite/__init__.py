"""The conformance tests that users run."""
