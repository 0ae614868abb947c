/* NCCL for machines without a GPU: ranks are threads of one process, their memory is the host's. */
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 8, INT8 = 0, SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };

typedef struct {
  char bytes[128];
} UniqueId;

typedef struct {
  int rank, freed;
} Rank;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
Rank group[MOST];
static const void* parts[MOST];
static int size, turn, left;

void* last_stream;
int arrived; /* ranks that wait */
int graphs;  /* CUDA graphs that gather */
int named;   /* groups that there were */

/* Waits for all ranks, unless one has left. */
static int meet(void) {
  int mine = turn;
  if (++arrived == size) {
    arrived = 0;
    turn++;
    pthread_cond_broadcast(&changed);
  }
  while (turn == mine && !left) pthread_cond_wait(&changed, &lock);
  return turn == mine ? SYSTEM_ERROR : SUCCESS;
}

int ncclGetUniqueId(UniqueId* id) {
  memset(id, 0, sizeof *id);
  memcpy(id->bytes, "a\0name", 6); /* zeros are a part of it */
  id->bytes[127] = (char)++named;
  return SUCCESS;
}

int ncclCommInitRank(Rank** made, int ranks, UniqueId id, int rank) {
  if (id.bytes[127] != (char)named || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
  pthread_mutex_lock(&lock);
  size = ranks;
  left = 0;
  group[rank] = (Rank){rank, 0};
  *made = &group[rank];
  int status = meet();
  pthread_mutex_unlock(&lock);
  return status;
}

int ncclAllGather(const void* mine, void* every, size_t count, int dtype, Rank* of, void* stream) {
  if (dtype != INT8 || of->freed) return INVALID_ARGUMENT;
  pthread_mutex_lock(&lock);
  last_stream = stream;
  parts[of->rank] = mine;
  int status = meet();
  if (status == SUCCESS) {
    for (int rank = 0; rank < size; rank++) memcpy((char*)every + rank * count, parts[rank], count);
    status = meet();
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int ncclCommAbort(Rank* of) {
  pthread_mutex_lock(&lock);
  left = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  while (*(volatile int*)&graphs) usleep(1000); /* as NCCL's own, which then frees the rank */
  of->freed = 1;
  return SUCCESS;
}

const char* ncclGetErrorString(int status) { return status == INVALID_ARGUMENT ? "invalid argument" : "system error"; }

const char* ncclGetLastError(Rank* of) { return "a rank is gone"; }
