"""What several processes of one run do together, and how long they wait for one another."""
