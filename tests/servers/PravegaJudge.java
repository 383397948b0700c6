// Pravega's own client, which tests let have reader groups, and look at those that we made: COMMAND CONTROLLER SCOPE GROUP ...
import java.net.URI; import java.util.*; import java.util.concurrent.*;
import io.pravega.client.*; import io.pravega.client.admin.*; import io.pravega.client.stream.*; import io.pravega.client.stream.impl.*;
public class PravegaJudge {
  public static void main(String[] a) throws Exception {
    ClientConfig config = ClientConfig.builder().controllerURI(URI.create("tcp://" + a[1])).build();
    String scope = a[2], group = a[3];
    try (ReaderGroupManager manager = ReaderGroupManager.withScope(scope, config)) {
      if (a[0].equals("create")) { // STREAM
        manager.createReaderGroup(group, ReaderGroupConfig.builder().stream(a[4]).disableAutomaticCheckpoints().build());
      } else if (a[0].equals("look")) {
        try (ReaderGroup g = manager.getReaderGroup(group)) {
          for (StreamCut cut : g.getStreamCuts().values()) {
            TreeMap<Long, Long> found = new TreeMap<>(); cut.asImpl().getPositions().forEach((s, at) -> found.put(s.getSegmentId(), at));
            System.out.println("cut " + found);
          }
          System.out.println("readers " + g.getOnlineReaders()); System.out.println("unread " + g.getMetrics().unreadBytes());
        }
      } else if (a[0].equals("reset")) { // to its last checkpoint
        try (ReaderGroup g = manager.getReaderGroup(group)) { g.resetReaderGroup(); }
      } else { // read READER STEP...: a number of events, "checkpoint", or "close"; without the last the reader stays
        ScheduledExecutorService pool = Executors.newSingleThreadScheduledExecutor();
        try (EventStreamClientFactory factory = EventStreamClientFactory.withScope(scope, config); ReaderGroup g = manager.getReaderGroup(group)) {
          EventStreamReader<String> reader = factory.createReader(a[4], group, new UTF8StringSerializer(), ReaderConfig.builder().build());
          CompletableFuture<Checkpoint> done = CompletableFuture.completedFuture(null);
          for (String step : Arrays.asList(a).subList(5, a.length)) {
            if (step.equals("close")) { reader.close(); continue; }
            boolean isCheckpoint = step.equals("checkpoint");
            if (isCheckpoint) done = g.initiateCheckpoint("java-" + System.nanoTime(), pool);
            for (int left = isCheckpoint ? 0 : Integer.parseInt(step); isCheckpoint ? !done.isDone() : left > 0; ) {
              EventRead<String> read = reader.readNextEvent(200);
              if (read.isCheckpoint()) System.out.println("checkpoint"); // the events in front of it are part of it
              if (read.getEvent() != null) { System.out.println("event " + read.getEvent()); left--; }
              else if (left > 0 && done.isDone()) done = g.initiateCheckpoint("java-" + System.nanoTime(), pool); // else no segment follows one that has ended
            }
            if (isCheckpoint) done.get();
          }
          System.out.flush();
          Runtime.getRuntime().halt(0);
        }
      }
    }
    System.out.flush();
    Runtime.getRuntime().halt(0); // its threads need a while
  }
}
