"""Job reports: what one job cost and where its GPU time went over all its nodes, and summaries of many jobs."""
