"""The rivals: systems that HCE is compared with, all behind the same `search(queries, k)`."""
