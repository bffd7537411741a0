"""The outbox on MariaDB and MySQL, with pymysql."""
