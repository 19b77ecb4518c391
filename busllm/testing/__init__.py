"""What tests of busllm and of its plug-ins build on: conformance suites, fakes, tiny models, a driver of plans."""
