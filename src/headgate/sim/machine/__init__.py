"""A simulated machine room: processes, threads, clocks, sockets and disks that obey one seed.

The runtime's own classes run on it without changes. Where a thread would block, a simulated task blocks, and only one
task makes a step at a time, in virtual time. Source: FoundationDB's simulation; Neon's desim, which simulates
synchronous code in the same way; TigerBeetle's VOPR.
"""
