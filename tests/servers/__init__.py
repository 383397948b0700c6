"""Real servers for tests: found on this machine, started on the loopback, ended with the tests."""
