"""A simulated machine room: processes, threads, clocks, sockets and disks that obey one seed.

The runtime's own classes run on it, as they are: what blocks a thread there blocks a task here, and only one task
makes a step at a time, in virtual time. Source: FoundationDB's simulation; Neon's desim, which lets synchronous code
be simulated in the same way; TigerBeetle's VOPR.
"""
