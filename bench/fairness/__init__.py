"""What queues do for whom: scenarios in virtual time, with the decisions and the engines of everything else here."""
